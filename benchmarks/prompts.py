"""The prompts: ten openings of tales, five tasks for real models, five people with a schema."""

from __future__ import annotations

__all__ = ["PEOPLE", "PEOPLE_SCHEMA", "PROMPTS", "TASKS"]

PROMPTS: tuple[str, ...] = (
    "Once upon a time there was a miller who had nothing left but his mill and one grey goose.",
    "In a village at the edge of the forest there lived a widow with three daughters,",
    "A king grew old and could not sleep, so he sent his youngest son out to find",
    "There was once a tailor who boasted that he could sew a coat for the moon.",
    "Long ago, when wishes were still of some use, a poor fisherman caught a golden eel,",
    "The old soldier had served for twenty years, and all they gave him was a rusty sword.",
    "High on the glass mountain stood a castle without a door, and in it sat a princess",
    "A fox and a bear agreed to plough a field together and to share what grew there.",
    "Every evening a little bird came to the window and sang, and one evening it said,",
    'One winter night somebody knocked. "Who is there?" asked the old woman.',
)


# Texts that a model of 135M parameters continues sensibly. The answer begins at the end of each.
_CODE = """\
def report(orders, customer):
    total = 0.0
    for order in orders:
        total += order["price"] * order["quantity"]
    print("Customer:", customer["name"])
    print("Address:", customer["street"], customer["city"])
    print("Number of orders:", len(orders))
    print("Sum of orders:", round(total, 2), "EUR")
    return total
"""
_NOTICE = """\
The village of Hollow Bridge holds its autumn fair on the last Saturday of September, from ten in the \
morning until the lamps are lit. There are forty stalls along the river, with apples and cider, cheese, \
honey, baskets and wool. At noon the bakers race with trays of rolls on their heads. Please leave the \
car at the sawmill: the bridge is closed to carts and cars all day. If it rains, everything moves into \
the barn and the school."""
TASKS: dict[str, str] = {
    "edit": f"""\
# The original, with the variable `total`:
{_CODE}
# The same function, with `amount` instead of `total`:
def report(orders, customer):
    amount = 0.0
    for order in orders:""",
    "extract": """\
Text: Otto Baumgartner, born in 1957, is a railway engineer in Innsbruck. Mail: otto@bahn.example.at
JSON: {"full_name": "Otto Baumgartner", "born": 1957, "occupation": "railway engineer", \
"city_of_residence": "Innsbruck", "contact_email": "otto@bahn.example.at"}

Text: Maria Lindqvist, born in 1982, is a marine biologist in Gothenburg. Mail: \
maria.lindqvist@example.org
JSON:""",
    "quote": f"""\
{_NOTICE}

A summary that quotes the notice word for word:
1. When it is: "The village of Hollow Bridge holds its autumn fair on the last Saturday of September"
2. Where to leave the car: \"""",
    "translate": """\
English: the house, the tree, the river, the bread, the king, the water, the night, the book
French: la maison, l'arbre, la rivière, le pain, le roi, l'eau, la nuit, le livre

English: the king, the night, the book, the house, the river, the water, the bread, the tree
French:""",
    "free": "The three most important things to know about the sea are",
}

PEOPLE_SCHEMA = {
    "type": "object",
    "properties": {
        "full_name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "city_of_residence": {"type": "string", "maxLength": 30},
        "occupation": {"type": "string", "maxLength": 40},
        "employment_status": {"enum": ["employed", "self-employed", "retired", "student"]},
        "hobbies": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
        "has_children": {"type": "boolean"},
        "contact_email": {"anyOf": [{"type": "string", "format": "email"}, {"type": "null"}]},
    },
    "required": [
        "full_name", "age", "city_of_residence", "occupation", "employment_status", "hobbies",
        "has_children", "contact_email",
    ],
    "additionalProperties": False,
}  # fmt: skip
PEOPLE = (
    "Maria Lindqvist is a 42 year old marine biologist who lives in Gothenburg. She enjoys sailing, "
    "chess and baking bread with her two sons. Her address is maria.lindqvist@example.org.",
    "At 67, the former railway engineer Otto Baumgartner spends his days in Innsbruck painting "
    "landscapes and repairing clocks. He has no children and no e-mail address.",
    "Chiara Benedetti, 23, studies architecture in Bologna and plays volleyball and the violin. "
    "You can write to chiara@studenti.example.it.",
    "Our neighbour Samuel Okafor, aged 35, runs his own bakery in Leeds. After work he coaches a "
    "football team in which his daughter plays (samuel@okafor-bread.example).",
    "Ingrid Solheim retired last year, at 61, as head nurse of the hospital of Bergen. She knits, hikes "
    "and sings in a choir; her three children live abroad.",
)
