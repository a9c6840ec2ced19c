package loop

// size gives the number of objects that wait.
func (b *inbox) size() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.now.items)
}
