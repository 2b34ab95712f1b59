"""The chart, its releases and its queries."""
