"""Who orthogonalizes what, and what travels: everything that is known before a step."""
