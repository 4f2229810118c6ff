"""Check whether a scorer is the published one: python -m omni_reward.verify --scorer imagereward."""

from omni_reward.scorers.published import main

if __name__ == "__main__":
    main()
