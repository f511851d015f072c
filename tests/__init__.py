import os
import sys

# README's command leaves compiling to the first import, as pip compiles all that is installed for
# half of its time. So what is imported here must be written, or every process compiles it again.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
