"""omni_reward"""
