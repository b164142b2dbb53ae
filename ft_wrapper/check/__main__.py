"""``python -m ft_wrapper.check``."""

import sys

from . import main

sys.exit(main())
