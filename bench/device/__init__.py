"""Checks and measurements on a GPU: `bash bench/device/check.sh`."""
