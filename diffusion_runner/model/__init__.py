"""The digits model: a small diffusion transformer, written once for torch and once for JAX."""
