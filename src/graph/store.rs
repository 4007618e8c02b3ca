//! Storage of the nodes of a graph: ids that stay valid when other nodes are removed, and edges in both directions.

use super::Node;

/// Index of a node of a [`Graph`](super::Graph).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct NodeId(u32);

impl NodeId {
    fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Debug)]
struct Entry {
    node: Node,
    /// In slot order.
    operands: Vec<NodeId>,
    /// One for each slot that reads the node.
    readers: Vec<NodeId>,
}

/// Nodes with the ids of their operands and readers. The id of a removed node is given to a later one.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    entries: Vec<Option<Entry>>,
    free: Vec<NodeId>,
}

impl Store {
    pub fn add(&mut self, node: Node, operands: &[NodeId]) -> NodeId {
        let id = self.free.pop().unwrap_or_else(|| {
            self.entries.push(None);
            NodeId((self.entries.len() - 1) as u32)
        });
        self.entries[id.index()] = Some(Entry {
            node,
            operands: Vec::new(),
            readers: Vec::new(),
        });
        self.connect(id, operands);
        id
    }

    pub fn remove(&mut self, id: NodeId) {
        self.connect(id, &[]);
        if let Some(entry) = self.entries[id.index()].take() {
            self.free.push(id);
            for reader in entry.readers {
                if let Some(reader) = &mut self.entries[reader.index()] {
                    reader.operands.retain(|&operand| operand != id);
                }
            }
        }
    }

    pub fn contains(&self, id: NodeId) -> bool {
        self.entries.get(id.index()).is_some_and(Option::is_some)
    }

    /// All ids in order.
    pub fn ids(&self) -> impl Iterator<Item = NodeId> + '_ {
        let ids = (0..self.entries.len()).map(|index| NodeId(index as u32));
        ids.filter(|&id| self.contains(id))
    }

    pub fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }

    pub fn node(&self, id: NodeId) -> &Node {
        &self.entry(id).node
    }

    pub fn node_mut(&mut self, id: NodeId) -> &mut Node {
        &mut self.entry_mut(id).node
    }

    /// Operands in slot order.
    pub fn operands(&self, id: NodeId) -> &[NodeId] {
        &self.entry(id).operands
    }

    /// Readers, one for each slot that reads the node.
    pub fn readers(&self, id: NodeId) -> &[NodeId] {
        &self.entry(id).readers
    }

    /// Replaces the operands of a node.
    pub fn connect(&mut self, id: NodeId, operands: &[NodeId]) {
        let before = std::mem::replace(&mut self.entry_mut(id).operands, operands.to_vec());
        for operand in before {
            let readers = &mut self.entry_mut(operand).readers;
            if let Some(at) = readers.iter().position(|&reader| reader == id) {
                readers.swap_remove(at);
            }
        }
        for &operand in operands {
            self.entry_mut(operand).readers.push(id);
        }
    }

    /// Returns a node that depends on itself, if there is one.
    pub fn cycle(&self) -> Option<NodeId> {
        // Remove nodes without unvisited operands until none is left (Kahn 1962).
        let mut waiting: Vec<usize> = vec![0; self.entries.len()];
        let mut ready = Vec::new();
        for id in self.ids() {
            waiting[id.index()] = self.operands(id).len();
            if self.operands(id).is_empty() {
                ready.push(id);
            }
        }
        while let Some(id) = ready.pop() {
            for &reader in self.readers(id) {
                waiting[reader.index()] -= 1;
                if waiting[reader.index()] == 0 {
                    ready.push(reader);
                }
            }
        }
        // Nodes that remain are on a cycle or after one. Following unvisited operands leads onto the cycle.
        let mut id = self.ids().find(|id| waiting[id.index()] > 0)?;
        for _ in 0..self.entries.len() {
            let mut operands = self.operands(id).iter();
            id = *operands.find(|operand| waiting[operand.index()] > 0)?;
        }
        Some(id)
    }

    fn entry(&self, id: NodeId) -> &Entry {
        let entry = self.entries[id.index()].as_ref();
        entry.expect("an id is used only while its node is in the graph")
    }

    fn entry_mut(&mut self, id: NodeId) -> &mut Entry {
        let entry = self.entries[id.index()].as_mut();
        entry.expect("an id is used only while its node is in the graph")
    }
}
