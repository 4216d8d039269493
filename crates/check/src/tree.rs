//! The statements of a configuration, with their contexts and enclosing blocks.

use gale_config::{Contexts, Statement};

/// A statement with its context.
#[derive(Clone, Copy)]
pub struct Node<'s> {
    pub statement: &'s Statement,
    pub context: Contexts,
    /// Index of the enclosing block.
    pub parent: Option<usize>,
}

impl<'s> Node<'s> {
    pub fn name(&self) -> &'s [u8] {
        &self.statement.name.text
    }

    pub fn is(&self, name: &str) -> bool {
        self.name() == name.as_bytes()
    }

    /// Returns the argument with this index, or an empty text if there is none.
    pub fn arg(&self, number: usize) -> &'s [u8] {
        self.statement.args.get(number).map_or(b"", |word| &word.text)
    }
}

/// All statements in text order. Blocks that contain no directives (`map`, `types`) are not entered, nor are unknown
/// blocks.
pub struct Tree<'s> {
    pub nodes: Vec<Node<'s>>,
}

impl<'s> Tree<'s> {
    pub fn new(statements: &'s [Statement]) -> Self {
        let mut tree = Tree { nodes: Vec::new() };
        tree.add(statements, Contexts::MAIN, None);
        tree
    }

    // The recursion is bounded by the parser's limit for nested blocks.
    fn add(&mut self, statements: &'s [Statement], context: Contexts, parent: Option<usize>) {
        for statement in statements {
            let number = self.nodes.len();
            self.nodes.push(Node { statement, context, parent });
            if let Some(inner) = inside(context, &statement.name.text) {
                self.add(statement.body(), inner, Some(number));
            }
        }
    }

    /// Iterates over the enclosing blocks of a statement, from the innermost outwards.
    pub fn ancestors(&self, number: usize) -> impl Iterator<Item = (usize, Node<'s>)> + '_ {
        let parent = |number: usize| self.nodes[number].parent;
        std::iter::successors(parent(number), move |&number| parent(number)).map(|number| (number, self.nodes[number]))
    }

    /// Iterates over the statements with this name and their indices.
    pub fn named<'t>(&'t self, name: &'static str) -> impl Iterator<Item = (usize, Node<'s>)> + 't {
        self.nodes.iter().copied().enumerate().filter(move |(_, node)| node.is(name))
    }
}

/// Returns the context of the directives in a block with this name, or `None` if it contains no directives.
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
