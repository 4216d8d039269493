//! The chores that are not part of the product.

fn main() {}
