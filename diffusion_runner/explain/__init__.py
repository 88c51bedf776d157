"""``pagestride explain``: an allocation as a picture, its figures, and who owns a byte.

Everything shown comes from resolved plans (``layout_core.ResolvedLayout``) and the counts of
``layout_core.runs`` and ``layout_core.owners``; nothing here knows a stride formula.
"""
