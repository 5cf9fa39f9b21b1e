"""Settings every test shares: one CPU thread per process, hypothesis profiles."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, settings

settings.register_profile(
    "dev", max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", parent=settings.get_profile("dev"), max_examples=200)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))
