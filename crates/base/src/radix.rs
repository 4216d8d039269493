//! A byte-wise radix tree for longest-prefix matching, used for locations and other prefixes.
//!
//! Bytes are compared as they are: the caller folds case and decodes percent-escapes. Keys are never removed.
//! Invariant: no two children of a node begin with the same byte, and every node but the root has a non-empty label, so
//! a lookup compares each byte of the text at most once and does not allocate.

/// A map from prefixes to values.
///
/// ```
/// let mut tree = gale_base::radix::PrefixTree::new();
/// tree.insert(b"/", 'r');
/// tree.insert(b"/img/", 'i');
/// assert_eq!(tree.longest_prefix(b"/img/a.png"), Some((&'i', 5)));
/// assert_eq!(tree.longest_prefix(b"/imgs"), Some((&'r', 1)));
/// ```
#[derive(Clone, Debug)]
pub struct PrefixTree<T> {
    /// The root comes first. Nodes refer to each other by index.
    nodes: Vec<Node<T>>,
    values: usize,
}

#[derive(Clone, Debug)]
struct Node<T> {
    /// The bytes that this node adds to its parent's key.
    label: Box<[u8]>,
    /// Length of the node's whole key, its label included.
    key_bytes: usize,
    parent: usize,
    /// Sorted by the first byte of their labels.
    children: Vec<usize>,
    value: Option<T>,
}

const ROOT: usize = 0;

impl<T> PrefixTree<T> {
    /// An empty tree.
    pub fn new() -> Self {
        let root = Node { label: Box::default(), key_bytes: 0, parent: ROOT, children: Vec::new(), value: None };
        PrefixTree { nodes: vec![root], values: 0 }
    }

    /// The number of prefixes in the tree.
    pub fn len(&self) -> usize {
        self.values
    }

    /// Returns `true` if the tree has no prefixes.
    pub fn is_empty(&self) -> bool {
        self.values == 0
    }

    /// Adds a prefix and returns its previous value. The empty prefix matches every text.
    pub fn insert(&mut self, prefix: &[u8], value: T) -> Option<T> {
        let node = self.node_for(prefix);
        let old = self.nodes[node].value.replace(value);
        self.values += usize::from(old.is_none());
        old
    }

    /// Returns the value of exactly this prefix.
    pub fn get(&self, prefix: &[u8]) -> Option<&T> {
        let node = &self.nodes[self.deepest(prefix)];
        if node.key_bytes == prefix.len() { node.value.as_ref() } else { None }
    }

    /// Returns the value of the longest prefix of `text`, and the length of that prefix in bytes.
    pub fn longest_prefix(&self, text: &[u8]) -> Option<(&T, usize)> {
        self.prefixes(text).next()
    }

    /// Iterates over the values of all prefixes of `text`, with their lengths in bytes, from the longest to the
    /// shortest.
    pub fn prefixes(&self, text: &[u8]) -> Prefixes<'_, T> {
        Prefixes { tree: self, next: Some(self.deepest(text)) }
    }

    /// Returns the deepest node whose whole key is a prefix of the text.
    fn deepest(&self, text: &[u8]) -> usize {
        let mut current = ROOT;
        loop {
            let rest = &text[self.nodes[current].key_bytes..];
            match self.child(current, rest) {
                Ok(slot) => {
                    let child = self.nodes[current].children[slot];
                    if !rest.starts_with(&self.nodes[child].label) {
                        return current;
                    }
                    current = child;
                }
                Err(_) => return current,
            }
        }
    }

    /// Returns the position, among the children of `node`, of the child that shares the first byte of `rest`, or the
    /// position at which to insert it.
    fn child(&self, node: usize, rest: &[u8]) -> Result<usize, usize> {
        let Some(&first) = rest.first() else {
            return Err(0);
        };
        self.nodes[node].children.binary_search_by_key(&first, |&child| self.nodes[child].label[0])
    }

    /// Returns the node of exactly this key, creating it if necessary.
    fn node_for(&mut self, key: &[u8]) -> usize {
        let current = self.deepest(key);
        let rest = &key[self.nodes[current].key_bytes..];
        if rest.is_empty() {
            return current;
        }
        match self.child(current, rest) {
            Err(slot) => self.add_leaf(current, slot, rest),
            Ok(slot) => {
                let child = self.nodes[current].children[slot];
                let shared = self.nodes[child].label.iter().zip(rest).take_while(|(a, b)| a == b).count();
                let middle = self.split(child, slot, shared);
                if shared == rest.len() {
                    return middle;
                }
                let slot = self.child(middle, &rest[shared..]).unwrap_or_else(|slot| slot);
                self.add_leaf(middle, slot, &rest[shared..])
            }
        }
    }

    fn add_leaf(&mut self, parent: usize, slot: usize, label: &[u8]) -> usize {
        let leaf = self.nodes.len();
        let key_bytes = self.nodes[parent].key_bytes + label.len();
        self.nodes.push(Node { label: label.into(), key_bytes, parent, children: Vec::new(), value: None });
        self.nodes[parent].children.insert(slot, leaf);
        leaf
    }

    /// Inserts a node between `child` and its parent that takes over the first `shared` bytes of the child's label.
    fn split(&mut self, child: usize, slot: usize, shared: usize) -> usize {
        let middle = self.nodes.len();
        let parent = self.nodes[child].parent;
        let (head, tail) = self.nodes[child].label.split_at(shared);
        let (head, tail): (Box<[u8]>, Box<[u8]>) = (head.into(), tail.into());
        debug_assert!(!head.is_empty() && !tail.is_empty());
        let key_bytes = self.nodes[child].key_bytes - tail.len();
        self.nodes.push(Node { label: head, key_bytes, parent, children: vec![child], value: None });
        self.nodes[child].label = tail;
        self.nodes[child].parent = middle;
        self.nodes[parent].children[slot] = middle;
        middle
    }
}

impl<T> Default for PrefixTree<T> {
    fn default() -> Self {
        Self::new()
    }
}

/// Iterator over the prefixes of a text: see [`PrefixTree::prefixes`].
#[derive(Clone, Debug)]
pub struct Prefixes<'t, T> {
    tree: &'t PrefixTree<T>,
    next: Option<usize>,
}

impl<'t, T> Iterator for Prefixes<'t, T> {
    type Item = (&'t T, usize);

    fn next(&mut self) -> Option<Self::Item> {
        while let Some(index) = self.next {
            let node = &self.tree.nodes[index];
            self.next = (index != ROOT).then_some(node.parent);
            if let Some(value) = &node.value {
                return Some((value, node.key_bytes));
            }
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn tree(prefixes: &[&str]) -> PrefixTree<String> {
        let mut tree = PrefixTree::new();
        for prefix in prefixes {
            tree.insert(prefix.as_bytes(), prefix.to_string());
        }
        tree
    }

    #[test]
    fn the_longest_prefix_wins() {
        let tree = tree(&["/", "/images/", "/images/icons/", "/image"]);
        for (text, expected) in [
            ("/", "/"),
            ("/imag", "/"),
            ("/image", "/image"),
            ("/images", "/image"),
            ("/images/", "/images/"),
            ("/images/icons", "/images/"),
            ("/images/icons/a.png", "/images/icons/"),
        ] {
            let (found, length) = tree.longest_prefix(text.as_bytes()).unwrap();
            assert_eq!((found.as_str(), length), (expected, expected.len()), "{text}");
        }
    }

    #[test]
    fn all_prefixes_come_from_longest_to_shortest() {
        let tree = tree(&["", "/a", "/ab", "/abcd", "/b"]);
        let found: Vec<_> = tree.prefixes(b"/abcde").map(|(value, length)| (value.as_str(), length)).collect();
        assert_eq!(found, [("/abcd", 5), ("/ab", 3), ("/a", 2), ("", 0)]);
    }

    #[test]
    fn an_empty_tree_and_a_text_without_prefix_find_nothing() {
        assert_eq!(PrefixTree::<u8>::new().longest_prefix(b"/"), None);
        assert_eq!(tree(&["/a"]).longest_prefix(b"/b"), None);
        assert_eq!(tree(&["/a"]).longest_prefix(b""), None);
    }

    #[test]
    fn the_same_prefix_again_replaces_the_value() {
        let mut tree = PrefixTree::new();
        assert_eq!(tree.insert(b"/a", 1), None);
        assert_eq!(tree.insert(b"/a", 2), Some(1));
        assert_eq!((tree.get(b"/a"), tree.len()), (Some(&2), 1));
    }

    #[test]
    fn case_matters() {
        assert_eq!(tree(&["/A"]).longest_prefix(b"/a"), None);
    }

    proptest! {
        #[test]
        fn agrees_with_a_plain_map(
            keys in proptest::collection::vec("[ab/]{0,6}", 0..30),
            text in "[ab/]{0,10}",
        ) {
            let mut tree = PrefixTree::new();
            let mut map = BTreeMap::new();
            for (index, key) in keys.iter().enumerate() {
                prop_assert_eq!(tree.insert(key.as_bytes(), index), map.insert(key.clone(), index));
            }
            prop_assert_eq!(tree.len(), map.len());
            let expected: Vec<_> = (0..=text.len())
                .rev()
                .filter_map(|length| map.get(&text[..length]).map(|value| (value, length)))
                .collect();
            prop_assert_eq!(tree.prefixes(text.as_bytes()).collect::<Vec<_>>(), expected);
            prop_assert_eq!(tree.get(text.as_bytes()), map.get(&text));
        }
    }
}
