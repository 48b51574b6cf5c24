"""The links of machines: what they are, what subsets exchanged over them, and what cells lose
against them.
"""
