import pytest

from .tiny import save_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> str:
    """The name (a folder) of a tiny random Llama with a chat template."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))
