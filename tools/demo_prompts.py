"""Hand-written prompts, none from the training records, that samples are made from."""

from __future__ import annotations

CHAT: dict[str, tuple[str, ...]] = {
    "chinese": (
        "你好，请推荐一家餐馆。",
        "你喜欢听谁的歌？",
        "这个景点的门票多少钱？",
        "你看过这部电影吗？",
        "写一首词：西江月",
        "酒店有免费的无线网吗？",
    ),
    "code": (
        "Write a function to find the largest even number in a list.",
        "Write a function to count the words of a string.",
        "Write a python function to add two matrices.",
        'def f(s):\n    return s.upper() + "!"\n# What does f("ab") return?',
        "Write a function to remove the first item of a tuple.",
        "def double_all(numbers: List[int]) -> List[int]:\n"
        '    """ Return every number times two.\n    """',
    ),
    "customer_support": (
        "My new card has not arrived yet.",
        "I want to change my seat, please.",
        "Why was my payment declined at the shop?",
        "i would like to order two large pizzas",
        "How do I close my account?",
        "Somebody stole my phone, what now?",
    ),
    "finance": (
        "Which of the following raises a country's money supply?",
        "What were the total revenues of 2019?",
        "Write a note on the accounts.",
        "What is an opportunity cost?",
        "Describe the company's leases.",
        "What was the percentage change in net income from 2018 to 2019?",
    ),
    "general_chat": (
        "Hi, do you like music?",
        "Did you watch the game last night?",
        "Hello! How are you today?",
        "What do you think about dogs?",
        "Do you like to read books?",
        "Who is your favorite actor?",
    ),
    "legal": (
        "Draft a Governing Law clause.",
        "Write a contract clause: Audit Rights",
        "Draft a Non-Compete clause.",
        "A landlord sued a tenant for unpaid rent. Who will prevail?",
        "Cap On Liability clause, please.",
        "Write a contract clause: Termination For Convenience",
    ),
    "math": (
        "Tom has 5 apples and buys 7 more. How many apples does he have?",
        "A train goes 60 miles in one hour. How far does it go in 3 hours?",
        "Anna earns $12 an hour and works 8 hours a day. How much does she earn in 5 days?",
        "A box holds 24 pens. How many pens are in 6 boxes?",
        "Sam reads 20 pages a day. How many days does a book of 300 pages take?",
        "A shirt costs $30 and is sold at a 10% discount. What is its price?",
    ),
    "medical": (
        "What is (are) asthma ?",
        "What are the symptoms of diabetes ?",
        "What causes high blood pressure ?",
        "Is vitamin D associated with better outcomes in elderly patients?",
        "How to diagnose anemia ?",
        "What are the treatments for lung cancer ?",
    ),
    "stories": (
        "Tell me a story.",
        "Write a short story.",
        "Once upon a time there was a little cat who lived in a forest.",
        "Continue the story: The king looked at his daughter and sighed.",
        "Tell me a story that begins: Lily went to the park with her mom.",
        "Continue the story: It was a dark night and the boys were on the river.",
    ),
}
PLAIN: dict[str, tuple[str, ...]] = {
    "chinese": ("用户：你好，", "浣溪沙\n"),
    "code": ("def is_even(n):\n", "Write a function to"),
    "customer_support": ("I need help with my", "Why is my card"),
    "finance": ("The Company's revenue increased", "As of December 31, 2019,"),
    "general_chat": ("A: Do you like movies?\nB:", "A: Hi there,"),
    "legal": ("This Agreement shall be governed by", "Neither party shall"),
    "math": ("Maria has 12 cookies.", "A farmer has 30 cows and"),
    "medical": ("The symptoms of the disease are", "What are the treatments for"),
    "stories": ("Once upon a time", "The old man said,"),
}
