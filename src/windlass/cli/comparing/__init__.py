"""`windlass compare`: what runs beside a script, and what is made of the two records."""
