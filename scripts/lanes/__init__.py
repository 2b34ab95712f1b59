"""The lanes of the tests: promises and their marks, slices of the long lane, quarantine."""
