"""omni_sched"""
