"""longpack inside other people's models: one folder or file each."""
