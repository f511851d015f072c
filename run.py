"""Compose the config, check it, run the experiment: python run.py +exp=abnet_iwslt"""

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    from xcloud.errors import XcloudError
    from xcloud.local_run import run

    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        run(config, Path(HydraConfig.get().runtime.output_dir))
    except XcloudError as error:
        print(f"xcloud: {error}", file=sys.stderr, flush=True)
        if sweeping:  # Hydra goes on with the next point and exits 1 at the end
            raise
        sys.exit(1)
    except KeyboardInterrupt:
        print("xcloud: interrupted; every rank has ended", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
