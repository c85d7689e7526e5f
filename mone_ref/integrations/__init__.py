"""What users import: substituted checkpoints in other people's libraries."""
