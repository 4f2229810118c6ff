"""omni_losses"""
