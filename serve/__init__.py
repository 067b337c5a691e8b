"""Exported heads in engines of other projects; state.py and base.py know none of them."""
