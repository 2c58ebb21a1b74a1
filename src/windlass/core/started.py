"""Where this process was when it imported Windlass. A script may change its working directory later, and the command
that started it is typed where it was typed then.
"""

import os

try:
    FOLDER = os.getcwd()
except OSError:  # it was removed
    FOLDER = ""
