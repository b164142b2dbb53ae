import sys

from .explore import main

if __name__ == "__main__":
    sys.exit(main())
