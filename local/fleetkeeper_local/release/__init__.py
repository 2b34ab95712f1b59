"""A release: wheels, images and the chart, each named by its content."""
