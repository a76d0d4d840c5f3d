"""DTensor- and DeviceMesh-native 3D parallelism for pretraining transformers."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("meshtron")
except PackageNotFoundError:  # a checkout on PYTHONPATH without an install
    __version__ = "0+unknown"
