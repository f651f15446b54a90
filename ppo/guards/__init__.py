"""Guards: rules about metrics, decided alike on every rank."""
