"""Tests of ``integrations``. Those named ``check_*.py`` need another package than the main
environment has; ``tools/conformance.py`` runs them where it is."""
