"""The scheduler service, which lets its workers keep no page for its successor. Only to compare with."""

import sys
from unittest.mock import patch

from scheduler_svc import __main__ as service

if __name__ == "__main__":
    with patch.object(service, "root_name", return_value=""):
        sys.exit(service.main())
