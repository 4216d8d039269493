//! The statements of a configuration with their contexts and what they stand in.

use gale_config::{Contexts, Statement};

/// A statement whose context is known.
#[derive(Clone, Copy)]
pub struct Node<'s> {
    pub statement: &'s Statement,
    pub context: Contexts,
    /// The block that it stands in, as its number.
    pub parent: Option<usize>,
}

impl<'s> Node<'s> {
    pub fn name(&self) -> &'s [u8] {
        &self.statement.name.text
    }

    pub fn is(&self, name: &str) -> bool {
        self.name() == name.as_bytes()
    }

    /// The argument of this number from 0 on; empty if there is none.
    pub fn arg(&self, number: usize) -> &'s [u8] {
        self.statement.args.get(number).map_or(b"", |word| &word.text)
    }
}

/// All of them, in the order of the text. Blocks that hold no directives (`map`, `types`) are left closed, as are those
/// that nobody knows.
pub struct Tree<'s> {
    pub nodes: Vec<Node<'s>>,
}

impl<'s> Tree<'s> {
    pub fn new(statements: &'s [Statement]) -> Self {
        let mut tree = Tree { nodes: Vec::new() };
        tree.add(statements, Contexts::MAIN, None);
        tree
    }

    // As deep as the parser lets blocks be nested.
    fn add(&mut self, statements: &'s [Statement], context: Contexts, parent: Option<usize>) {
        for statement in statements {
            let number = self.nodes.len();
            self.nodes.push(Node { statement, context, parent });
            if let Some(inner) = inside(context, &statement.name.text) {
                self.add(statement.body(), inner, Some(number));
            }
        }
    }

    /// The blocks around a statement, from the innermost on.
    pub fn ancestors(&self, number: usize) -> impl Iterator<Item = (usize, Node<'s>)> + '_ {
        let parent = |number: usize| self.nodes[number].parent;
        std::iter::successors(parent(number), move |&number| parent(number)).map(|number| (number, self.nodes[number]))
    }

    /// The statements of this name, with their numbers.
    pub fn named<'t>(&'t self, name: &'static str) -> impl Iterator<Item = (usize, Node<'s>)> + 't {
        self.nodes.iter().copied().enumerate().filter(move |(_, node)| node.is(name))
    }
}

/// What directives stand in a block of this name; `None` where there are none.
fn inside(context: Contexts, name: &[u8]) -> Option<Contexts> {
    Some(match (context, name) {
        (Contexts::MAIN, b"events") => Contexts::EVENTS,
        (Contexts::MAIN, b"http") => Contexts::HTTP,
        (Contexts::MAIN, b"stream") => Contexts::STREAM,
        (Contexts::HTTP, b"server") => Contexts::SERVER,
        (Contexts::HTTP, b"upstream") => Contexts::UPSTREAM,
        (Contexts::SERVER | Contexts::LOCATION, b"location") => Contexts::LOCATION,
        (Contexts::SERVER, b"if") => Contexts::IF_IN_SERVER,
        (Contexts::LOCATION, b"if") => Contexts::IF_IN_LOCATION,
        (Contexts::LOCATION, b"limit_except") => Contexts::LIMIT_EXCEPT,
        (Contexts::STREAM, b"server") => Contexts::STREAM_SERVER,
        (Contexts::STREAM, b"upstream") => Contexts::STREAM_UPSTREAM,
        _ => return None,
    })
}
