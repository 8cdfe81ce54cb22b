"""As far as the fakes have it."""
