"""omni_train"""
