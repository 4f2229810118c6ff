"""omni_rollout"""
