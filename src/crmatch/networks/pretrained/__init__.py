"""Pretrained backbones: what there is, where the weights come from, and the networks themselves."""
