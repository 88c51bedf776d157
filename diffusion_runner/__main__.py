"""``python -m diffusion_runner`` is the ``pagestride`` command."""

from diffusion_runner.cli import main

main()
