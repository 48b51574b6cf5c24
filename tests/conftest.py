"""What several test files start from."""

from pathlib import Path

import pytest
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra

from conf import schema


@pytest.fixture(scope="module")
def hydra():
    """Hydra reads this checkout's configuration; `compose` works inside."""
    GlobalHydra.instance().clear()
    schema.register()
    with initialize_config_dir(str(Path(__file__).parent.parent / "conf"), version_base="1.3"):
        yield
