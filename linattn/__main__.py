"""python -m linattn demo | train | info"""

import sys

from linattn.programs.command_line import main

if __name__ == "__main__":
    sys.exit(main())
