"""A finished comparison for people and programs: tables, figures, JSON."""
