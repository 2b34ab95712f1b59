"""Constants and pure checks that the operator and the engine share. This package imports no other package."""
