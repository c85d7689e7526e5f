"""The version of this package, in a file of its own: manifests name it, without torch."""

VERSION = "0.1.0"
