"""What only a GPU can show. ``make gpu`` runs it; the files are named so that nothing else does."""
