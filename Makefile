build:
	.venv/bin/python setup.py -q build_ext --inplace
.PHONY: build
