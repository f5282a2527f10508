"""in_turn.py JSON: runs of train_bert.py one after another in this process, up to the first that
fails. JSON: a list of lists of arguments."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import train_bert


def main(runs):
    for words in runs:
        sys.argv[1:] = words
        code = train_bert.main()
        if code != 0:
            return code
    return 0


if __name__ == "__main__":
    exit_code = main(json.loads(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)  # as train_bert.py does
