"""Compose the config, check it, run the experiment: python run.py +exp=abnet_iwslt"""

import sys
from pathlib import Path

# Before hydra looks for plugins: our launcher of sweeps.
sys.path.append(str(Path(__file__).parent / "xcloud" / "_hydra"))

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

CONF = Path(__file__).parent / "conf"
composed = False


@hydra.main(config_path="conf", config_name="config", version_base="1.3")
def main(config: DictConfig) -> None:
    global composed
    composed = True
    from xcloud.errors import XcloudError
    from xcloud.job.follow_up import compose_follow_up
    from xcloud.run.local import run

    sweeping = HydraConfig.get().mode == RunMode.MULTIRUN
    try:
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        following = None if sweeping else compose_follow_up(config, CONF, run_dir)
        run(config, run_dir)
        if following is not None:
            run(following, run_dir / "follow_up")
    except XcloudError as error:
        if sweeping:  # the launcher says which point it was and why, and goes on with the next
            raise
        print(f"xcloud: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    except KeyboardInterrupt:
        print("xcloud: interrupted; every rank has ended", file=sys.stderr, flush=True)
        sys.exit(130)


if __name__ == "__main__":
    for flag in {"-m", "--multirun"} & {*sys.argv}:  # argparse knows it at either end only
        sys.argv.remove(flag)
        sys.argv.insert(1, flag)
    try:
        main()
    except SystemExit as ended:
        if ended.code == 1 and not composed:  # Hydra has said which key, not which there are
            from xcloud.job.config import hints

            for line in hints([word for word in sys.argv[1:] if not word.startswith("-")], CONF):
                print(f"xcloud: {line}", file=sys.stderr, flush=True)
        raise
    except KeyboardInterrupt:  # before a run began, or after a sweep's last
        print("xcloud: interrupted; nothing was running", file=sys.stderr, flush=True)
        sys.exit(130)
