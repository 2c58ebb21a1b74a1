"""What `windlass prove` has shown: small models, layouts, and the record that runs look up. Nothing imports torch."""
