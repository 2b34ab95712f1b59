"""The version of every distribution of this repository, of the chart and of the images."""

VERSION = "0.1.0"
