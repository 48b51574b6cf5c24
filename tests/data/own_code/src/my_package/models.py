"""Small networks."""

from torch import nn


def build(classes, channels, width=4):
    pooled = nn.AdaptiveAvgPool2d(1), nn.Flatten()
    first = nn.Conv2d(channels, width, 3), nn.ReLU()
    return nn.Sequential(*first, *pooled, nn.Linear(width, classes))


def nothing(classes, channels, width):
    return "no module"
