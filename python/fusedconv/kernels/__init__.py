"""Built-in providers. Each module has a ``register(registry)``, like a third party's plugin."""
