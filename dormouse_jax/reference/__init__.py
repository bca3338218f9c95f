"""Plain jnp references: the recurrence token by token, and its chunked form."""
