"""The router of the unit tests, for attacks on its port."""

from tests.unit.router.conftest import folder, module_router

__all__ = ["folder", "module_router"]
