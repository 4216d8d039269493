//! "Did you mean": the known name nearest to a misspelled one.
//!
//! Suggests only near names: at most one edit per three characters.
//! Invariant: the work is bounded, since names longer than [`NAME_BYTES_MAX`] are not compared.

/// Longer names are not compared. No directive of nginx is nearly as long.
pub const NAME_BYTES_MAX: usize = 64;

/// Returns the candidate nearest to `wrong`, if it is near enough; the first one of several equally near.
pub fn nearest<'c>(wrong: &[u8], candidates: impl IntoIterator<Item = &'c str>) -> Option<&'c str> {
    if wrong.len() > NAME_BYTES_MAX {
        return None;
    }
    let farthest = (wrong.len() / 3).max(1);
    candidates
        .into_iter()
        .filter(|candidate| candidate.len() <= NAME_BYTES_MAX && candidate.len().abs_diff(wrong.len()) <= farthest)
        .map(|candidate| (distance(wrong, candidate.as_bytes()), candidate))
        .filter(|(distance, candidate)| *distance <= farthest && *distance < candidate.len())
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, candidate)| candidate)
}

/// Returns the edit distance of two names: insertions, deletions, substitutions, and swaps of neighbours. Case is
/// ignored.
pub fn distance(one: &[u8], two: &[u8]) -> usize {
    // Three rows of the table of distances between prefixes; `rows[2]` is the one being filled.
    let mut rows = [vec![0; two.len() + 1], (0..=two.len()).collect(), vec![0; two.len() + 1]];
    for i in 1..=one.len() {
        rows[2][0] = i;
        for j in 1..=two.len() {
            let replaced = usize::from(!same(one[i - 1], two[j - 1]));
            let mut least = (rows[1][j - 1] + replaced).min(rows[1][j] + 1).min(rows[2][j - 1] + 1);
            if i > 1 && j > 1 && same(one[i - 1], two[j - 2]) && same(one[i - 2], two[j - 1]) {
                least = least.min(rows[0][j - 2] + 1);
            }
            rows[2][j] = least;
        }
        rows.rotate_left(1);
    }
    rows[1][two.len()]
}

fn same(one: u8, two: u8) -> bool {
    one.eq_ignore_ascii_case(&two)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edits_are_counted() {
        for (one, two, edits) in [
            ("listen", "listen", 0),
            ("lissten", "listen", 1),
            ("lisen", "listen", 1),
            ("lisetn", "listen", 1),
            ("Listen", "listen", 0),
            ("", "abc", 3),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(one.as_bytes(), two.as_bytes()), edits, "{one} {two}");
        }
    }

    #[test]
    fn the_nearest_name_is_found() {
        let names = ["listen", "server_name", "location", "root", "types"];
        assert_eq!(nearest(b"lissten", names), Some("listen"));
        assert_eq!(nearest(b"servername", names), Some("server_name"));
        assert_eq!(nearest(b"locatoin", names), Some("location"));
        assert_eq!(nearest(b"LISTEN", names), Some("listen"));
    }

    #[test]
    fn nothing_is_guessed_from_afar() {
        let names = ["listen", "root", "if"];
        assert_eq!(nearest(b"proxy_pass", names), None);
        assert_eq!(nearest(b"x", names), None);
        assert_eq!(nearest(b"", names), None);
        assert_eq!(nearest(&[b'a'; 5_000], names), None);
    }

    proptest! {
        #[test]
        fn the_distance_is_symmetric_and_bounded(one in "[abc]{0,12}", two in "[abc]{0,12}") {
            let edits = distance(one.as_bytes(), two.as_bytes());
            prop_assert_eq!(edits, distance(two.as_bytes(), one.as_bytes()));
            prop_assert!(edits <= one.len().max(two.len()));
            prop_assert!(edits >= one.len().abs_diff(two.len()));
            prop_assert_eq!(edits == 0, one == two);
        }
    }
}
