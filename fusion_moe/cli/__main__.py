"""python -m fusion_moe.cli"""

from . import main

if __name__ == "__main__":
    main()
